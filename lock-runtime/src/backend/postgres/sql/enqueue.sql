-- Queues each owner whose key is held, and grants the others. Runs behind lock_rows.sql. The keys are distinct.
-- $1 keys, $2 owners, $3 microseconds of the leases, $4 numbers of further fences, $5 channel of this process or '',
-- $6 texts about the owners
-- One row for each request: its number from 1; first fence or NULL if queued; whether other owners are queued;
-- microseconds until the holder's lease expires, NULL without a holder; rank in the queue, 0 if not queued. No row where the
-- lease has no row.
WITH asked AS MATERIALIZED (
    SELECT number, key, owner, kept * interval '1 microsecond' AS kept, further, /*info info, info*/
        (extract(epoch FROM statement_timestamp()) * 1000000)::bigint AS clock
    FROM unnest($1::bytea[], $2::bytea[], $3::bigint[], $4::bigint[] /*info , $6::bytea[] info*/)
        WITH ORDINALITY AS asked (key, owner, kept, further, /*info info, info*/ number)
), locked AS MATERIALIZED (
    SELECT asked.*, lease.until, lease.contended, lease.channel,
        lease.until > statement_timestamp() AND lease.owner = asked.owner AS is_own,
        /*pin lease.owner <> asked.owner AS queues, pin*/
        lease.until > statement_timestamp() AND lease.owner NOT IN (asked.owner, '') AS is_held
    FROM asked JOIN lock_lease AS lease ON lease.key = asked.key
    -- Also a row that was made behind lock_rows.sql.
    ORDER BY lease.key
    FOR UPDATE OF lease
), /*pin unpinned AS MATERIALIZED (
    -- A fence row that is locked is pinned by an open transaction of a former holder.
    SELECT pin.key FROM lock_fence AS pin JOIN locked ON locked.key = pin.key
    WHERE NOT is_held
    ORDER BY pin.key
    FOR UPDATE OF pin SKIP LOCKED
), pin*/ found AS MATERIALIZED (
    SELECT locked.*, is_held /*pin OR (
        EXISTS (SELECT FROM lock_fence AS pin WHERE pin.key = locked.key)
        AND NOT EXISTS (SELECT FROM unpinned WHERE unpinned.key = locked.key)
    ) pin*/ AS is_refused
    FROM locked
), left_queue AS (
    DELETE FROM lock_queue AS queued USING found
    WHERE queued.key = found.key AND queued.owner = found.owner AND NOT found.is_refused
), granted AS (
    UPDATE lock_lease AS lease SET
        owner = found.owner,
        channel = $5,
        /*info info = found.info, info*/
        until = CASE WHEN is_own THEN greatest(lease.until, statement_timestamp() + kept)
            ELSE statement_timestamp() + kept END,
        fence = CASE WHEN is_own THEN lease.fence ELSE greatest(lease.last_fence + 1, clock) END,
        last_fence = CASE WHEN is_own THEN greatest(lease.last_fence, lease.fence + further)
            ELSE greatest(lease.last_fence + 1, clock) + further END,
        contended = EXISTS (
            SELECT FROM lock_queue AS other WHERE other.key = found.key AND other.owner <> found.owner
        )
    FROM found
    WHERE lease.key = found.key AND NOT is_refused
    RETURNING lease.key, lease.fence, lease.contended
), /*pin raised AS (
    -- Fails the pins of former holders from here on.
    INSERT INTO lock_fence AS pin (key, fence) SELECT key, fence FROM granted ORDER BY key
    ON CONFLICT (key) DO UPDATE SET fence = excluded.fence WHERE pin.fence <> excluded.fence
), pin*/ queued AS (
    INSERT INTO lock_queue AS queued (key, owner, channel, seen)
    SELECT key, owner, $5, statement_timestamp() FROM found
    -- The key was handed off to an owner that a pin delays: it is in front of the queue.
    WHERE is_refused /*pin AND queues pin*/
    ORDER BY key
    ON CONFLICT (key, owner) DO UPDATE SET channel = excluded.channel, seen = excluded.seen
    RETURNING key, position
), marked AS (
    UPDATE lock_lease AS lease SET contended = true
    FROM found
    WHERE lease.key = found.key AND is_refused AND NOT found.contended /*pin AND queues pin*/
), /*pin reserved AS (
    -- A pin may outlast the reservation. The owner asks again while it waits.
    UPDATE lock_lease AS lease SET until = greatest(lease.until, statement_timestamp() + interval '1 second')
    FROM found
    WHERE lease.key = found.key AND is_refused AND NOT queues
), pin*/ notified AS MATERIALIZED (
    SELECT pg_notify(channel, 'wanted 0 ' || encode(owner, 'escape') || ' ' || encode(key, 'hex'))
    FROM found
    WHERE is_held AND NOT contended AND channel <> ''
)
SELECT found.number, granted.fence, granted.contended,
    CASE WHEN found.is_held
        THEN (extract(epoch FROM found.until - statement_timestamp()) * 1000000)::bigint END AS expires_in,
    (
        SELECT count(*) FROM lock_queue AS earlier
        WHERE earlier.key = queued.key AND earlier.position < queued.position
            AND earlier.seen > statement_timestamp() - interval '10 seconds'
    ) AS rank,
    (SELECT count(*) FROM notified) AS notified
FROM found
    LEFT JOIN granted ON granted.key = found.key
    LEFT JOIN queued ON queued.key = found.key

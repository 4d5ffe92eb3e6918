-- Grants each key that is free, expired or the owner's already. The keys are distinct.
-- $1 keys, $2 owners, $3 microseconds of the leases, $4 numbers of further fences, $5 channel of this process or '',
-- $6 texts about the owners
-- One row for each request: its number from 1; first fence or NULL if refused; whether owners are queued; microseconds
-- until the holder's lease expires; rank of this owner if it is queued, and was not long ago.
WITH asked AS MATERIALIZED (
    SELECT number, key, owner, kept * interval '1 microsecond' AS kept, further, /*info info, info*/
        (extract(epoch FROM statement_timestamp()) * 1000000)::bigint AS clock
    FROM unnest($1::bytea[], $2::bytea[], $3::bigint[], $4::bigint[] /*info , $6::bytea[] info*/)
        WITH ORDINALITY AS asked (key, owner, kept, further, /*info info, info*/ number)
), /*pin unpinned AS MATERIALIZED (
    -- A fence row that is locked is pinned by an open transaction of a former holder. Held keys are left alone.
    SELECT pin.key FROM lock_fence AS pin JOIN asked ON asked.key = pin.key
    WHERE NOT EXISTS (
        SELECT FROM lock_lease AS held
        WHERE held.key = asked.key AND held.owner NOT IN (asked.owner, '')
            AND held.until > statement_timestamp()
    )
    ORDER BY pin.key
    FOR UPDATE OF pin SKIP LOCKED
), pin*/ granted AS (
    INSERT INTO lock_lease AS lease (key, owner, until, fence, last_fence, channel /*info , info info*/)
    SELECT key, owner, statement_timestamp() + kept, clock, clock + further, $5 /*info , info info*/
    FROM asked
    -- A refused request writes nothing. The condition below decides if another one gets there first.
    WHERE NOT EXISTS (
        SELECT FROM lock_lease AS held
        WHERE held.key = asked.key AND held.owner NOT IN (asked.owner, '')
            AND held.until > statement_timestamp()
    )
    /*pin AND (
        EXISTS (SELECT FROM unpinned WHERE unpinned.key = asked.key)
        OR NOT EXISTS (SELECT FROM lock_fence AS pin WHERE pin.key = asked.key)
    ) pin*/
    -- All statements lock rows in this order, so none waits for another in a circle.
    ORDER BY key
    ON CONFLICT (key) DO UPDATE SET
        owner = excluded.owner,
        channel = excluded.channel,
        /*info info = excluded.info, info*/
        -- A request by the present owner is a retry: it gets the same fence, and never shortens the lease.
        until = CASE WHEN lease.owner = excluded.owner AND lease.until > statement_timestamp()
            THEN greatest(lease.until, excluded.until) ELSE excluded.until END,
        fence = CASE WHEN lease.owner = excluded.owner AND lease.until > statement_timestamp()
            THEN lease.fence ELSE greatest(lease.last_fence + 1, excluded.fence) END,
        last_fence = CASE WHEN lease.owner = excluded.owner AND lease.until > statement_timestamp()
            THEN greatest(lease.last_fence, lease.fence + excluded.last_fence - excluded.fence)
            ELSE greatest(lease.last_fence + 1, excluded.fence) + excluded.last_fence - excluded.fence END
    WHERE lease.until <= statement_timestamp() OR lease.owner IN (excluded.owner, '')
    RETURNING key, fence, contended
), /*pin raised AS (
    -- Fails the pins of former holders from here on.
    INSERT INTO lock_fence AS pin (key, fence) SELECT key, fence FROM granted ORDER BY key
    ON CONFLICT (key) DO UPDATE SET fence = excluded.fence WHERE pin.fence <> excluded.fence
), pin*/ left_queue AS (
    -- An owner that was queued and finds the key free is no longer queued.
    DELETE FROM lock_queue AS queued USING granted JOIN asked ON asked.key = granted.key
    WHERE queued.key = granted.key AND queued.owner = asked.owner
)
SELECT asked.number, granted.fence, granted.contended,
    (extract(epoch FROM held.until - statement_timestamp()) * 1000000)::bigint AS expires_in,
    CASE WHEN granted.key IS NULL AND queued.seen > statement_timestamp() - interval '2 seconds'
        THEN (
            SELECT count(*) FROM lock_queue AS earlier
            WHERE earlier.key = queued.key AND earlier.position < queued.position
                AND earlier.seen > statement_timestamp() - interval '10 seconds'
        ) END AS rank
FROM asked
    LEFT JOIN granted ON granted.key = asked.key
    LEFT JOIN lock_lease AS held
        ON held.key = asked.key AND held.owner NOT IN ('', asked.owner) AND held.until > statement_timestamp()
    LEFT JOIN lock_queue AS queued
        ON queued.key = asked.key AND queued.owner = asked.owner AND queued.channel = $5

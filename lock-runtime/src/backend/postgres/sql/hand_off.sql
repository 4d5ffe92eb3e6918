-- Ends each lease for the head of its wait queue, and removes the owner from the queue. Runs behind lock_rows.sql.
-- $1 keys, $2 owners, $3 microseconds of a reservation for the head, $4 successors or '', $5 microseconds of their
-- leases, $6 microseconds of the barging window, $7 channel of this process or '', $8 microseconds until the keys are free
-- One row for each key that was the owner's: the key, whether there was a head
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(
        $1::bytea[], $2::bytea[], $3::bigint[], $4::bytea[], $5::bigint[], $6::bigint[], $8::bigint[]
    ) AS asked (key, owner, reservation, successor, kept, barging_window, free_after)
), held AS MATERIALIZED (
    SELECT asked.* FROM asked JOIN lock_lease AS lease ON lease.key = asked.key AND lease.owner = asked.owner
    WHERE lease.until > statement_timestamp()
), waiting AS MATERIALIZED (
    SELECT held.key, alive.owner, alive.channel, alive.position,
        row_number() OVER (PARTITION BY held.key ORDER BY alive.position) AS place
    FROM held CROSS JOIN LATERAL (
        SELECT queued.owner, queued.channel, queued.position
        FROM lock_queue AS queued
        -- A key that is kept for a while is handed off to no owner.
        WHERE held.free_after = 0 AND queued.key = held.key AND queued.owner <> held.owner
            AND queued.seen > statement_timestamp() - interval '10 seconds'
            -- A channel is named after the server process of its listener, which ends with the connection.
            AND (queued.channel = '' OR EXISTS (
                SELECT FROM pg_stat_get_activity(split_part(queued.channel, '_', 3)::integer)
            ))
        ORDER BY queued.position
        LIMIT 2
    ) AS alive
), served AS MATERIALIZED (
    SELECT held.*, head.owner AS head, head.channel AS head_channel, head.position,
        next.owner AS next, next.channel AS next_channel,
        barging_window = 0 AND head.owner IS NOT NULL AS is_handed_off,
        free_after = 0 AND barging_window = 0 AND (head.owner IS NOT NULL OR successor <> '') AS is_granted
    FROM held
        LEFT JOIN waiting AS head ON head.key = held.key AND head.place = 1
        LEFT JOIN waiting AS next ON next.key = held.key AND next.place = 2
), left_queue AS (
    DELETE FROM lock_queue AS queued
    USING asked LEFT JOIN served ON served.key = asked.key
    WHERE queued.key = asked.key
        AND (queued.owner = asked.owner OR (served.is_handed_off AND queued.position <= served.position))
), passed AS (
    UPDATE lock_lease AS lease SET
        owner = CASE WHEN free_after > 0 THEN lease.owner WHEN barging_window > 0 THEN ''
            ELSE coalesce(head, successor) END,
        channel = coalesce(head_channel, $7),
        until = statement_timestamp() + CASE WHEN free_after > 0 THEN free_after WHEN barging_window > 0 THEN 0
            WHEN head IS NOT NULL THEN reservation ELSE kept END * interval '1 microsecond',
        fence = CASE WHEN is_granted THEN greatest(
            last_fence + 1, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
        ) ELSE fence END,
        last_fence = CASE WHEN is_granted THEN greatest(
            last_fence + 1, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
        ) ELSE last_fence END,
        contended = (free_after > 0 AND contended) OR next IS NOT NULL OR (head IS NOT NULL AND (barging_window > 0 OR successor <> ''))
    FROM served
    WHERE lease.key = served.key
), appended AS (
    INSERT INTO lock_queue AS queued (key, owner, channel, seen)
    SELECT key, successor, $7, statement_timestamp() FROM served
    WHERE is_handed_off AND successor <> ''
    ORDER BY key
    ON CONFLICT (key, owner) DO UPDATE SET channel = excluded.channel, seen = excluded.seen
), notified AS MATERIALIZED (
    SELECT pg_notify(
        head_channel,
        'head ' || barging_window / 1000 || ' ' || encode(head, 'escape') || ' ' || encode(key, 'hex')
    ) FROM served WHERE head_channel <> ''
    UNION ALL
    -- The head may be a process that is frozen.
    SELECT pg_notify(
        next_channel,
        'head ' || reservation / 1000 || ' ' || encode(next, 'escape') || ' ' || encode(key, 'hex')
    ) FROM served WHERE is_handed_off AND next_channel <> ''
)
SELECT key, is_handed_off, (SELECT count(*) FROM notified) AS notified FROM served

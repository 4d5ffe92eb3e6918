-- Reads the holder of a key and its wait queue. Locks nothing.
-- $1 the key, $2 number of waiters
-- One row for the holder, if there is one: 0, owner, microseconds until its lease expires, fence, NULL, text about
-- the owner. Then one for each of the first waiters: its position, owner, NULL, NULL, number of all waiters, NULL
SELECT 0::bigint AS position, owner,
    (extract(epoch FROM until - statement_timestamp()) * 1000000)::bigint AS expires_in, fence, NULL::bigint AS waiting
    /*info , info info*/
FROM lock_lease
WHERE key = $1::bytea AND owner <> '' AND until > statement_timestamp()
UNION ALL (
    SELECT position, owner, NULL::bigint, NULL::bigint, count(*) OVER () /*info , NULL::bytea info*/
    FROM lock_queue AS queued
    WHERE queued.key = $1::bytea
        AND queued.seen > statement_timestamp() - interval '10 seconds'
        -- A channel is named after the server process of its listener, which ends with the connection.
        AND (queued.channel = '' OR EXISTS (
            SELECT FROM pg_stat_get_activity(split_part(queued.channel, '_', 3)::integer)
        ))
    ORDER BY position
    LIMIT $2::bigint
)
ORDER BY position

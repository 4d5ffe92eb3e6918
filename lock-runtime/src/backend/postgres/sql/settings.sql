-- The settings and states by which locks could be lost. One row.
SELECT pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on' AS is_read_only,
    current_setting('fsync') = 'off' AS does_not_flush,
    current_setting('synchronous_commit') = 'off' AS commits_early,
    (current_setting('synchronous_standby_names') = '' OR current_setting('synchronous_commit') = 'local')
        AND EXISTS (SELECT FROM pg_stat_replication) AS may_lose_at_failover,
    EXISTS (
        SELECT FROM pg_class WHERE oid = to_regclass('lock_lease') AND relpersistence = 'u'
    ) AS is_unlogged,
    pg_notification_queue_usage() > 0.5 AS notifications_pile_up,
    (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS clock

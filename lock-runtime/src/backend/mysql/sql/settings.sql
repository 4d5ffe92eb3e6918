-- The settings by which locks could be lost, and the server's clock. One row, then the states of replication.
SELECT @@global.read_only NOT IN ('0', 'OFF') OR @@innodb_read_only NOT IN ('0', 'OFF') AS is_read_only,
    @@global.innodb_flush_log_at_trx_commit <> 1 AS commits_early,
    @@log_bin NOT IN ('0', 'OFF') AND @@global.sync_binlog <> 1 AS binlog_is_not_flushed,
    EXISTS (
        SELECT 1 FROM information_schema.TABLES
        WHERE TABLE_SCHEMA = :schema AND TABLE_NAME IN (:names) AND ENGINE <> 'InnoDB'
    ) AS is_not_transactional,
    TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) AS clock;
SHOW GLOBAL STATUS WHERE Variable_name IN ('Slaves_connected', 'Rpl_semi_sync_master_status', 'Rpl_semi_sync_source_status',
    'wsrep_cluster_size')

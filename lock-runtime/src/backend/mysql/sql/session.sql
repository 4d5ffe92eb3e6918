-- Makes a session independent of the server's and the user's settings, and bounds each statement on the server too.
-- In `/*M! */` for MariaDB alone, in `/*!80000 */` for MySQL alone.
-- :seconds limit of one statement, :millis the same
SET SESSION autocommit = 1, sql_mode = 'STRICT_ALL_TABLES', completion_type = 'NO_CHAIN', sql_safe_updates = 0,
    sql_select_limit = DEFAULT, innodb_lock_wait_timeout = 1, lock_wait_timeout = 1, wait_timeout = 600
    /*M! , max_statement_time = :seconds, idle_transaction_timeout = 2 */ /*!80000 , max_execution_time = :millis */;
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE

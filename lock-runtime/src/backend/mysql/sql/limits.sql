-- Bounds each statement on the server too: one that this process has given up may still wait for a row there.
-- In `/*M! */` for MariaDB alone, in `/*!80000 */` for MySQL alone.
-- :seconds limit of one statement, :millis the same
SET SESSION innodb_lock_wait_timeout = 1, lock_wait_timeout = 1
    /*M! , max_statement_time = :seconds, idle_transaction_timeout = 2 */ /*!80000 , max_execution_time = :millis */

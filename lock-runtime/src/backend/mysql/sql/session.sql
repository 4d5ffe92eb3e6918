-- Makes a session independent of the server's and the user's settings.
SET SESSION autocommit = 1, sql_mode = 'STRICT_ALL_TABLES', completion_type = 'NO_CHAIN', sql_safe_updates = 0,
    sql_select_limit = DEFAULT, wait_timeout = 20;
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE

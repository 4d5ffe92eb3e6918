-- Makes a session independent of the server's and the user's settings. A default of the session is the server's global value.
-- A client that stops reading a long answer keeps rows locked until the end of the last limit.
SET SESSION autocommit = 1, sql_mode = 'STRICT_ALL_TABLES', completion_type = 'NO_CHAIN', sql_safe_updates = 0,
    sql_select_limit = 18446744073709551615, sql_big_selects = 1, wait_timeout = 20, net_write_timeout = 5;
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE

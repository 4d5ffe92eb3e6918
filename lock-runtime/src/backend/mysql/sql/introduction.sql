-- One row: the server as a part of names of channels, whether it accepts no writes, the longest packet, the session's number
-- In `/*M! */` for MariaDB alone, in `/*!80000 */` for MySQL alone: what differs between servers that are made from one image.
SELECT LOWER(HEX(CRC32(CONCAT_WS('/', @@hostname, @@port, @@server_id /*!80000 , @@server_uuid */ /*M! , (
        SELECT GROUP_CONCAT(VARIABLE_VALUE ORDER BY VARIABLE_NAME) FROM information_schema.GLOBAL_VARIABLES
        WHERE VARIABLE_NAME IN ('SERVER_UID', 'WSREP_NODE_NAME')
    ) */)))),
    @@global.read_only NOT IN ('0', 'OFF') OR @@innodb_read_only NOT IN ('0', 'OFF'),
    @@max_allowed_packet, CONNECTION_ID()

-- One row: the server as a part of names of channels, whether it accepts no writes
SELECT LOWER(HEX(CRC32(CONCAT_WS('/', @@hostname, @@port, @@server_id)))),
    @@global.read_only NOT IN ('0', 'OFF') OR @@innodb_read_only NOT IN ('0', 'OFF')

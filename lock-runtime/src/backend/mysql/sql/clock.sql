-- The time that the following statements compute with: microseconds since 1970 by the server, the same for all
-- time zones. It is read before any wait for a row, so that a grant is never longer than its row.
SET @now = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))

-- Extends each lease that is its owner's.
-- :keys, :leases key and owner in one text, :kept microseconds, :channel
UPDATE lock_lease FORCE INDEX (PRIMARY) SET
    until = GREATEST(until, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) + :kept),
    channel = :channel
WHERE `key` IN (:keys) AND CONCAT(`key`, owner) IN (:leases)
    AND until > TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))

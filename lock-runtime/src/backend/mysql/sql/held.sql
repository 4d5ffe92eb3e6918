-- :keys, :leases key and owner in one text
-- One row for each key that is its owner's: the key, the owner
SELECT `key`, owner FROM lock_lease WHERE `key` IN (:keys) AND CONCAT(`key`, owner) IN (:leases)
    AND until > TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))

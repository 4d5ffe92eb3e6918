-- :keys, :owner
-- How many of the keys are the owner's
SELECT COUNT(*) FROM lock_lease WHERE `key` IN (:keys) AND owner = :owner
    AND until > TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))

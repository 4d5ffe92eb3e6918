-- :key, :owner
DELETE FROM lock_queue WHERE `key` = :key AND owner = :owner
    AND EXISTS (SELECT 1 FROM lock_lease AS lease WHERE lease.`key` = :key AND lease.owner = :owner)

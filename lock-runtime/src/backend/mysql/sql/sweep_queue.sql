-- :key, :owner
DELETE FROM lock_queue WHERE `key` = :key AND owner = :owner AND seen < @now - 60000000

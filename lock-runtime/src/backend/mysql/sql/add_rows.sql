-- Makes rows of free locks for keys that have none.
-- :keys as rows of a table
INSERT IGNORE INTO lock_lease (`key`, owner, until, fence, last_fence)
SELECT asked.`key`, '', @now, 0, 0
FROM (:keys) AS asked LEFT JOIN lock_lease AS lease ON lease.`key` = asked.`key`
WHERE lease.`key` IS NULL
ORDER BY asked.`key`

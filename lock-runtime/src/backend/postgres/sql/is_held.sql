-- $1 numbers of the leases, $2 keys, $3 owners; one element for each key
-- For each lease with a key that is its owner's: its number, and how many of its keys are
SELECT asked.number, count(*)
FROM unnest($1::bigint[], $2::bytea[], $3::bytea[]) AS asked (number, key, owner)
    JOIN lock_lease AS lease ON lease.key = asked.key AND lease.owner = asked.owner
WHERE lease.until > statement_timestamp()
GROUP BY asked.number

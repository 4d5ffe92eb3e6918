-- $1 keys, $2 owner
-- How many of the keys are the owner's
SELECT count(*) FROM lock_lease WHERE key = ANY ($1::bytea[]) AND owner = $2::bytea AND until > statement_timestamp()

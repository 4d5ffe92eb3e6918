CREATE TABLE IF NOT EXISTS lock_lease (
    key bytea PRIMARY KEY,
    owner bytea NOT NULL,
    until timestamptz NOT NULL,
    fence bigint NOT NULL,
    last_fence bigint NOT NULL,
    channel text NOT NULL DEFAULT '',
    contended boolean NOT NULL DEFAULT false,
    info bytea
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0
);
CREATE TABLE IF NOT EXISTS lock_queue (
    key bytea NOT NULL,
    position bigint GENERATED ALWAYS AS IDENTITY,
    owner bytea NOT NULL,
    channel text NOT NULL,
    seen timestamptz NOT NULL,
    PRIMARY KEY (key, position),
    UNIQUE (key, owner)
);
/*pin
CREATE TABLE IF NOT EXISTS lock_fence (
    key bytea PRIMARY KEY,
    fence bigint NOT NULL
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0
);
pin*/

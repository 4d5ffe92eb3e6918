CREATE TABLE IF NOT EXISTS lock_lease (
    `key` varbinary(512) NOT NULL,
    owner varbinary(32) NOT NULL,
    until bigint NOT NULL,
    fence bigint NOT NULL,
    last_fence bigint NOT NULL,
    channel varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '',
    contended boolean NOT NULL DEFAULT false,
    info varbinary(255),
    PRIMARY KEY (`key`)
) ENGINE = InnoDB;
CREATE TABLE IF NOT EXISTS lock_queue (
    `key` varbinary(512) NOT NULL,
    owner varbinary(32) NOT NULL,
    position bigint NOT NULL,
    channel varchar(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    seen bigint NOT NULL,
    PRIMARY KEY (`key`, owner)
) ENGINE = InnoDB
/*pin ;
CREATE TABLE IF NOT EXISTS lock_fence (
    `key` varbinary(512) NOT NULL,
    fence bigint NOT NULL,
    PRIMARY KEY (`key`)
) ENGINE = InnoDB pin*/;

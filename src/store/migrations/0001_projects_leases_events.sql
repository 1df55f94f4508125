-- Instants are milliseconds since the Unix epoch, UTC.

CREATE TABLE projects (
    key            TEXT    NOT NULL PRIMARY KEY,
    repo           TEXT    NOT NULL,
    name           TEXT    NOT NULL,
    target         TEXT    NOT NULL,
    arch           TEXT    NOT NULL,
    -- IPv4 as a number, so that the lowest free one is a matter of arithmetic.
    address        INTEGER NOT NULL UNIQUE CHECK (address BETWEEN 0 AND 4294967295),
    phase          TEXT    NOT NULL,
    -- Why it failed; NULL in every other phase.
    phase_reason   TEXT,
    generation     INTEGER NOT NULL CHECK (generation >= 0),
    incarnation    TEXT,
    tier           TEXT    NOT NULL,
    idle_window_ms INTEGER CHECK (idle_window_ms >= 0),
    volume_bytes   INTEGER CHECK (volume_bytes >= 0),
    created        INTEGER NOT NULL,
    last_activity  INTEGER NOT NULL,
    CHECK ((phase = 'failed') = (phase_reason IS NOT NULL))
) STRICT, WITHOUT ROWID;

CREATE TABLE leases (
    -- SHA-256 of the token, never the token.
    token   TEXT    NOT NULL PRIMARY KEY,
    key     TEXT    NOT NULL REFERENCES projects (key),
    created INTEGER NOT NULL,
    renewed INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX leases_of_project ON leases (key, created);

-- Ids only ever grow: the newest row is never removed, and a plain INTEGER PRIMARY KEY counts on from it.
-- No reference to projects: an event outlives what it tells of.
CREATE TABLE events (
    id   INTEGER NOT NULL PRIMARY KEY,
    at   INTEGER NOT NULL,
    key  TEXT,
    kind TEXT    NOT NULL,
    text TEXT    NOT NULL
) STRICT;

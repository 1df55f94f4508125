-- Each lease carries its own end. One from before gets the two hours that were the rule then, counted from its birth: a
-- build that runs during the upgrade stays a build that runs. Orphans, which a hand must have made, come along.
CREATE TABLE leases_2 (
    -- SHA-256 of the token, never the token.
    token   TEXT    NOT NULL PRIMARY KEY,
    key     TEXT    NOT NULL REFERENCES projects (key),
    created INTEGER NOT NULL,
    renewed INTEGER NOT NULL,
    expires INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO leases_2 SELECT token, key, created, renewed, created + 7200000 FROM leases;
DROP TABLE leases;
ALTER TABLE leases_2 RENAME TO leases;
CREATE INDEX leases_of_project ON leases (key, created);

-- What was set for the project alone, as the JSON of the domain's Settings, in which what is not set is left out. The
-- tier `warm` was the default and nobody's choice; a window that a hot project had was never in force.
ALTER TABLE projects ADD COLUMN settings TEXT NOT NULL DEFAULT '{}';
UPDATE projects SET settings = json_patch('{}', json_object(
    'tier', iif(tier = 'hot', 'hot', NULL),
    'idle_window', json(iif(tier = 'hot' OR idle_window_ms IS NULL, 'null', json_object(
        'secs', min(idle_window_ms, 2592000000) / 1000,
        'nanos', iif(idle_window_ms < 2592000000, idle_window_ms % 1000 * 1000000, 0)))),
    'volume_bytes', volume_bytes));
ALTER TABLE projects DROP COLUMN tier;
ALTER TABLE projects DROP COLUMN idle_window_ms;
ALTER TABLE projects DROP COLUMN volume_bytes;

-- When its latest builds began: the JSON of the domain's BuildTimes.
ALTER TABLE projects ADD COLUMN builds TEXT NOT NULL DEFAULT '[]';

-- On whose account it happened, and by which rule of the plan, if by one. No index by key: it would be one page more in
-- every commit, for a question that people ask.
ALTER TABLE events ADD COLUMN "by" TEXT NOT NULL DEFAULT 'kiln';
ALTER TABLE events ADD COLUMN rule TEXT;

-- What the store remembers of itself. `pings`: how often somebody asked whether it can write. `rebuilt`: the projects
-- that were on the host when this file was new are in it; a file from before this table knew them all along.
CREATE TABLE notes (
    name  TEXT    NOT NULL PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO notes SELECT 'rebuilt', 1 WHERE EXISTS (SELECT 1 FROM projects);

-- Tokens that an admin gave out. Of the secret only the SHA-256 of the whole token is kept. `scope` is a JSON array of patterns of
-- repositories. A token that is revoked is gone; the journal tells of it.
CREATE TABLE tokens (
    id TEXT PRIMARY KEY NOT NULL,
    hash BLOB NOT NULL,
    name TEXT NOT NULL,
    grade TEXT NOT NULL,
    scope TEXT NOT NULL,
    made_by TEXT NOT NULL,
    created INTEGER NOT NULL,
    expires INTEGER,
    last_used INTEGER
) STRICT, WITHOUT ROWID;

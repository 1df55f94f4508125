-- What names the pull request whose fork a key is, for its forge; and what is remembered of a cache: the JSON of the domain's
-- CacheNotes, in which what is not known is left out.
ALTER TABLE projects ADD COLUMN pull_request TEXT;
ALTER TABLE projects ADD COLUMN cache TEXT NOT NULL DEFAULT '{}';

-- `kiln events --key` and `kiln why` read what is about one project, and not the whole journal for it. It is a page more in
-- a commit, and no flush: a hundred thousand rows are too many to walk for each who asks. The id comes with each entry.
CREATE INDEX events_of_project ON events (key) WHERE key IS NOT NULL;

//! See the room's first commit.

"""Everything that touches the world: effects performed, replies given."""

"""Update policies: where each bucket is updated, when it starts, when it is visible, what moves."""

"""What becomes of a tensor: boxes, layouts, rules, and the check of all of them."""

"""Which device stores what: data alone, no collective."""

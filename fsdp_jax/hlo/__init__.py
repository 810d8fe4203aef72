"""Parser of HLO text: instructions, collectives and their replica groups."""

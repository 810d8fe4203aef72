"""Parser of HLO text: instructions, their execution, collectives, replica groups."""

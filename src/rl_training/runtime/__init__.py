"""When and how much: collecting, training and evaluating. No algorithm is named here."""

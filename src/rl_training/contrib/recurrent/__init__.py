"""Recurrent policies: LSTM and GRU networks on sequences that may contain episode boundaries."""

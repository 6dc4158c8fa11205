"""The zoo: presets, benchmarks, results, pictures, and the search for better settings. It is no second runtime."""

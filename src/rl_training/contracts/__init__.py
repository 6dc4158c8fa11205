"""The vocabulary of the package: small types that every layer shares and that import nothing of ours."""

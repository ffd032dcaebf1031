"""Files, folders, memory and processes of this machine. Imports no torch: it runs before that."""

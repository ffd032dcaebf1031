"""Several processes on one model: process groups, failure detection, all-reduce."""

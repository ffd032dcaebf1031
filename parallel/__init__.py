"""Several processes that run one model: process groups, failure detection, all-reduce."""

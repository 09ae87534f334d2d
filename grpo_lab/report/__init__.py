"""Reports: what stored runs say, beside what the papers say."""

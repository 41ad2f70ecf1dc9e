"""The values of every arrow: specifications, loads, workloads, records, the catalogue, errors. Functions over them
may compute, but never measure or judge."""

"""--slm-seed: the same seed gives the same requests, another gives others."""

from inside import usage_error


def test_the_seed_decides_the_workload(sweep, archive):
    hashes = []
    for number, seed in enumerate((0, 0, 7)):
        sweep(f"--slm-seed={seed}", f"--slm-records={number}.jsonl", "--slm-concurrency=1,2")
        hashes.append(archive(f"{number}.jsonl").measurements[0].workload.hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_what_is_no_number_is_refused(sweep):
    assert "is not a whole number" in usage_error(sweep("--slm-seed=-1"))

"""Files on disk: archives, baselines, calibrations, waivers and results of other tools. Nothing here judges them."""

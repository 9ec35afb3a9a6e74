"""What is wrong with this machine, found by trying: packages, devices, memory, disk, processes, network."""

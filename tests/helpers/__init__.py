"""What tests of several packages share: fixtures (`checks`, `engines`, `packings`), fakes, faults and inputs."""

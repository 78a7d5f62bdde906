"""For the tests of this package and of those who build on it: servers, a faulty store, the contract of a store."""

"""Read data sets from files and the hub, check them, prepare them for training, convert and inspect them."""

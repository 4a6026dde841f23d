"""`penstock eval`: the accuracy of number formats and of running servers on a text."""

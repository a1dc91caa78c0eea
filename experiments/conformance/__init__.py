"""Does a policy keep its promises? Random worlds that a policy of anybody can be run through."""

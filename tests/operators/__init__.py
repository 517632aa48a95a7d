"""Every operator of torch's own operator database, on two ranks against one device."""

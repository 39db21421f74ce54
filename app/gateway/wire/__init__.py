"""Parts that the wire formats share: parameters, response formats, custom tools and validation errors."""

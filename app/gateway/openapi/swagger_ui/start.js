"use strict";
SwaggerUIBundle({
  dom_id: "#swagger-ui",
  url: "openapi.json",
  deepLinking: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  // Without this, Swagger UI would send the description to a validator elsewhere.
  validatorUrl: null,
});

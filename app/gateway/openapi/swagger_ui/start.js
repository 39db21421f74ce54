"use strict";
SwaggerUIBundle({
  dom_id: "#swagger-ui",
  url: "openapi.json",
  deepLinking: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  // Without this, Swagger UI would send the description to a validator elsewhere.
  validatorUrl: null,
  // A person's session in the admin API must repeat its token to change something.
  requestInterceptor: async (request) => {
    const changes = !["GET", "HEAD"].includes(request.method || "GET");
    if (changes && new URL(request.url, location).pathname.startsWith("/admin/")) {
      const me = await fetch("/admin/v1/me");
      const token = me.ok ? (await me.json()).csrf_token : null;
      if (token) request.headers["x-csrf-token"] = token;
    }
    return request;
  },
});

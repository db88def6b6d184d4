"use strict";
window.SwaggerUIBundle({
  url: `${document.body.dataset.root}/openapi.json`,
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
  defaultModelsExpandDepth: 0,
});
